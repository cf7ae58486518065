-- WHO: under which name the database knows us.
select session_user::text as session_user, current_setting('application_name') as application_name
